from billfish.core.errors import BillfishError

class DriverError(BillfishError): ...

class TensorMap:
    def __init__(self) -> None: ...  # of nothing, for kernels that read none

def tensor_map(pointer: int, numbers: int, rows: int, k: int, stride: int, box_rows: int, /) -> TensorMap: ...

class NativeLaunch:
    def __init__(
        self,
        function: int,
        context: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        cluster: int,
        overlap: bool,
        layout: str,
        /,
    ) -> None: ...
    def __call__(self, stream: int, /, *arguments: int | float | TensorMap) -> None: ...

class NativeProduct:
    def __init__(
        self,
        launch: NativeLaunch,
        bricks: int,
        row_scale: int,
        m: int,
        n: int,
        k: int,
        numbers: int,
        box_rows: int,
        /,
        first_place: int = 0,
        places: int = -1,
    ) -> None: ...
    def __call__(self, stream: int, x: int, x_stride: int, bias: int, y: int, /, *norm: int | float) -> None: ...

class Program:
    def __init__(self) -> None: ...
    def begin(self) -> None: ...  # from now on launches of this thread are recorded, not made
    def end(self) -> None: ...
    def __len__(self) -> int: ...
    def __call__(self, stream: int, /) -> None: ...
