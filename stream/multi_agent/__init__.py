"""Several agents in each environment: their columns, fragment by fragment."""
