"""The price of a step: bytes, transmission cost, step time, and expected traffic."""
