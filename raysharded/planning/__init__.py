"""What a run will need, before it is launched: memory by kind, bytes on the wire, and which layouts fit.

The model is pure: a layout's bytes follow from the model's shapes in well under a millisecond, so that a policy may ask
for thousands of them. Torch is needed only to find the shapes and the activations of a task (`tracing`).
"""
