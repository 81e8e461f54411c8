"""OpenVINO's tensors, as lists."""


def Tensor(array):
    return array.tolist()
