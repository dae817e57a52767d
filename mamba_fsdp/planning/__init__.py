"""What a training needs and costs on given machines: memory, seconds of a step, what would fit."""
