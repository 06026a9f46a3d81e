"""Training by recipes: images and texts, runs that resume."""
