"""The body that trains: it moves the bytes that plans name, and never decides."""
