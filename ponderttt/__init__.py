"""When should a test-time-training layer update its fast weights? A study as a pipeline."""
