"""The training loop: steps, progress, saves, stops, and the checks that watch over them."""
