"""What is done with trained models: scores, predictions, exports."""
