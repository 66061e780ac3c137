"""vLLM workers and executors around the model runner."""
