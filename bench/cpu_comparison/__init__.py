"""What bench/compare_cpu.py is made of."""
