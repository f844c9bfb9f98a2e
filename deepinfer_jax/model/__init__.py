"""The DeepSeek-V4.1 model as pure functions over parameter trees, one mechanism a file."""
