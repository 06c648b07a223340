"""What TensorFlow can do with a model on a cluster: which strategy holds it, and if none, what.

``tf.distribute`` parallelizes over data alone: a strategy copies every variable to all GPUs, or
keeps them in hosts' memory from where every GPU reads all of them. Larger models have to be split
by hand, layer by layer. Read off TensorFlow 2.21 and Keras 3.15; files are named where it matters.
"""
