"""DCP inside Transformers, Accelerate and Trainer."""
