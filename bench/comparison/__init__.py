"""What bench/compare.py and bench/plot.py are made of."""
