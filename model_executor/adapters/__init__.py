"""What is added to a checkpoint's weights while they are loaded."""
