"""The training loop: steps, progress, saves, stops and what watches over them."""
