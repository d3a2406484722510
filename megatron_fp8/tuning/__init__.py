"""Direct preference optimisation (DPO): the loss, the dataset of answer pairs, the reference model."""
