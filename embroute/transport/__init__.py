"""How bytes move between ranks: sockets or shared memory."""
