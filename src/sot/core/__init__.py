"""Section 3 of the paper. Imports torch and nothing else."""
