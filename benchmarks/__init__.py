"""How fast rollflow is, as ratios to something else that runs beside it in the same process."""
