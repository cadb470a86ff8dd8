"""The rooms of `tfdpx.train.audit`: many models at once, what they are attacked by, the phases."""
