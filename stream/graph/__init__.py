"""Graphs: nodes, ports, edges, chains, channels, running, meters and the report."""
