"""Hugging Face folders and safetensors files."""
