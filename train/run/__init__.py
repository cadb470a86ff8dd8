"""The parts of one training run: model, optimization, devices, checkpoint, evaluation."""
