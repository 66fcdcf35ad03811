"""Network: addresses that are dialled, sockets, TLS, and descriptors over Unix sockets. Nothing else opens a socket."""
