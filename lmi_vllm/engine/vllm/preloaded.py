"""What the fork server imports before it forks an engine; Python imports this module in it.

It ends with the thread of the server that started it, and so do its engines with it.
"""

import os

from lmi_vllm.engine.factory import imports_without_collections
from lmi_vllm.engine.vllm.cpu.companions import hide_unfit_companions
from lmi_vllm.engine.vllm.forks import end_with_parent, name_process
from lmi_vllm.engine.vllm.workarounds.slow_imports import quick_imports

end_with_parent(os.getppid())
name_process("fork-server")
with imports_without_collections(), quick_imports():
    hide_unfit_companions()
    import lmi_vllm.engine.vllm.start  # noqa: F401 (what a server has imported that forks)
