"""Which learning rate do networks of 1,000 to 10 million trained weights want?"""
