"""TensorFlow's strategies for a model on a cluster, and alternatives if none holds it.

``tf.distribute`` only parallelizes over data: a strategy copies every variable to all GPUs, or
keeps variables in hosts' memory, from which every GPU reads all of them. Split larger models
by hand, layer by layer. Based on the source of TensorFlow 2.21 and Keras 3.15.
"""
