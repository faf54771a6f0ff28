"""How bytes move between ranks: sockets, shared memory, Gloo, or within one process."""
