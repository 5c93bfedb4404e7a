"""Programs that use exported files in processes of their own."""

from __future__ import annotations

import subprocess
import sys

WEB = """
const fs = require("fs");
const [ort, file, pixels] = [require(process.argv[2]), process.argv[3], process.argv[4]];
const { detect, metadata } = require(process.argv[5]);
(async () => {
  ort.env.wasm.numThreads = 1;
  const bytes = new Uint8Array(fs.readFileSync(file));
  const about = metadata(bytes);
  const size = JSON.parse(about.preprocess).size;
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  const rgba = new Uint8Array(fs.readFileSync(pixels));
  console.log(JSON.stringify(await detect(ort, session, rgba, size, [640, 480], JSON.parse(about.names), 0.1)));
})();
"""

RUN_PROGRAM = """
import torch
if len(sys.argv) > 3:
    torch.ops.load_library(sys.argv[3])
inputs = torch.load(sys.argv[1])
if {packaged}:
    run = torch._inductor.aoti_load_package(sys.argv[2])
else:
    run = torch.export.load(sys.argv[2]).module()
torch.save([tuple(run(*each)) for each in inputs], sys.argv[1])
"""

ALONE = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Nothing())
sys.argv = {argv}
"""


def run_alone(code: str, blocked: set[str], argv: list[str]) -> str:
    """Output of code in a fresh process that cannot import some packages."""
    text = ALONE.format(blocked=blocked, argv=argv) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
