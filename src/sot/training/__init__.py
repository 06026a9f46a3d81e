"""Training by recipes: pictures and texts, runs that resume."""
