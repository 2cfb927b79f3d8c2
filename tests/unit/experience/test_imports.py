"""The package imports no heavy library: the driver loads it in processes that do not train."""

import pkgutil
import subprocess
import sys

import raylight.experience


def test_no_module_loads_torch_verl_or_ray():
    modules = pkgutil.walk_packages(raylight.experience.__path__, "raylight.experience.")
    names = [module.name for module in modules]
    assert len(names) > 30
    imports = "; ".join(f"import {name}" for name in names)
    loaded = "sorted({'ray', 'tensordict', 'torch', 'transformers', 'verl'} & set(sys.modules))"
    learner = "sorted(name for name in sys.modules if name.startswith('raylight.learner'))"
    code = f"import sys; {imports}; print({loaded} + {learner})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
