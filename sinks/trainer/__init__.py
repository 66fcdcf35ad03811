"""Trainer in another process or on another host: the stream, the sink, the feed and the child process."""
