"""The CUDA engine: kernels in CUDA C++ that NVRTC compiles at first use, for torch, CuPy and NumPy arrays.

    format planes -> the kernel axes (axes.py) -> bricks on the GPU (layout.py, device_weights.py)
    x, bricks -> a plan for the product (plans.py) -> a launch (driver.py) -> y

Nothing here is imported from CUDA until a product is to run on it: without a GPU or without the extra `cuda` the
backend says no, with the reason.
"""
