// MLX's header of this name adds bfloat overloads by way of compiler built-ins of Apple's; ours take bfloat as they are.
#pragma once
