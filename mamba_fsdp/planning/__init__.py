"""What a training needs and costs on given machines, by formulas: memory, seconds of a step, what would fit."""
