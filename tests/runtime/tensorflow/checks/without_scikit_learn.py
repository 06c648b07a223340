"""The images recipe on a host that has no scikit-learn."""

import importlib.util

import classify_images

found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name == "sklearn" else found(name, package)
)
classify_images.digits()
