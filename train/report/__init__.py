"""What a run says of itself: the record, the curve, pictures, the privacy statement."""
