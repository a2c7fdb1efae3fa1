"""Pictures of a plan: an image, and a page to click through."""
