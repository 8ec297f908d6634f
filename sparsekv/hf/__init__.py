"""Hugging Face transformers integration."""
