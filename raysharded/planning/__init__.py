"""A run's requirements, before its launch: memory by kind, traffic, and the layouts that fit.

The model is pure: a layout's bytes follow from the model's shapes in well under a millisecond, so that a policy may
evaluate thousands of layouts. Torch is needed only to find the shapes and the activations of a task (`tracing`).
"""
