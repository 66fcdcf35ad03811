"""Datasets: fragments written to Parquet files, and read from them as from a rollout."""
