// Detections of images with an exported ONNX file; see index.html. `decode` and `metadata` are tested with node.

"use strict";

// The entries of metadata_props (field 14 of an ONNX ModelProto: key = 1, value = 2), which onnxruntime-web does not show.
function metadata(bytes) {
  const text = new TextDecoder();
  const found = {};
  const varint = (at) => {
    let value = 0, factor = 1, byte;
    do {
      byte = bytes[at++];
      value += (byte & 127) * factor;
      factor *= 128;
    } while (byte & 128);
    return [value, at];
  };
  const fields = (at, end, visit) => {
    while (at < end) {
      let tag, size;
      [tag, at] = varint(at);
      if (tag % 8 === 2) [size, at] = varint(at);
      else if (tag % 8 === 0) [, size] = [0, varint(at)[1] - at];
      else size = tag % 8 === 1 ? 8 : 4;
      visit(Math.floor(tag / 8), at, at + size);
      at += size;
    }
  };
  fields(0, bytes.length, (field, start, end) => {
    if (field !== 14) return;
    const entry = {};
    fields(start, end, (part, from, to) => (entry[part] = text.decode(bytes.subarray(from, to))));
    found[entry[1]] = entry[2] ?? "";
  });
  return found;
}

// RGBA pixels of another size, opaque; sizes: [height, width]. The filter is OpenCV's cubic one, as in training.
function resized(rgba, oldSize, size) {
  const inner = (x) => (1.25 * x - 2.25) * x * x + 1;
  const outer = (x) => ((-0.75 * x + 3.75) * x - 6) * x + 3;
  const [down, across] = size.map((count, side) => Array.from({ length: count }, (_, i) => {
    const at = ((i + 0.5) * oldSize[side]) / count - 0.5, first = Math.floor(at), t = at - first;
    const place = (k) => Math.min(Math.max(first + k - 1, 0), oldSize[side] - 1);
    return [outer(1 + t), inner(t), inner(1 - t), outer(2 - t)].map((weight, k) => [place(k), weight]);
  }));
  const row = 4 * across.length, rows = new Float32Array(oldSize[0] * row);
  for (let y = 0; y < oldSize[0]; ++y) across.forEach((four, x) => {
    for (const [from, weight] of four) for (let c = 0; c < 3; ++c) rows[y * row + 4 * x + c] += weight * rgba[4 * (y * oldSize[1] + from) + c];
  });
  const to = new Uint8ClampedArray(down.length * row).fill(255);
  down.forEach((four, y) => {
    for (let i = 0; i < row; ++i) if (i % 4 < 3) to[y * row + i] = four.reduce((sum, [from, weight]) => sum + weight * rows[from * row + i], 0);
  });
  return to;
}

// RGBA pixels (height x width x 4) as uint8 (3, height, width).
function planes(rgba) {
  const count = rgba.length / 4;
  const to = new Uint8Array(3 * count);
  for (let i = 0; i < count; ++i) for (let c = 0; c < 3; ++c) to[c * count + i] = rgba[4 * i + c];
  return to;
}

// [{ name, score, box: [x1, y1, x2, y2] }] of one image, best first.
function decode(outputs, names, threshold) {
  const found = [];
  for (let i = 0; i < outputs.scores.data.length && outputs.scores.data[i] >= threshold; ++i) {
    const box = Array.from(outputs.boxes.data.slice(4 * i, 4 * i + 4));
    found.push({ name: names[Number(outputs.labels.data[i])], score: outputs.scores.data[i], box });
  }
  return found;
}

// Runs a session on pixels of the network's size; originalSize: [height, width].
async function detect(ort, session, rgba, size, originalSize, names, threshold) {
  const images = new ort.Tensor("uint8", planes(rgba), [1, 3, ...size]);
  const sizes = new ort.Tensor("int64", BigInt64Array.from(originalSize, BigInt), [1, 2]);
  return decode(await session.run({ images, sizes }), names, threshold);
}

// What onnxruntime-web shall compute with, best first; asked: webgpu, for which there must be a GPU, or wasm, the CPU.
async function providers(asked) {
  const has = asked === "webgpu" && typeof navigator.gpu !== "undefined" && (await navigator.gpu.requestAdapter());
  return has ? ["webgpu", "wasm"] : ["wasm"];
}

async function page() {
  const say = (text) => (document.getElementById("status").textContent = text);
  const [canvas, device] = ["canvas", "device"].map((id) => document.getElementById(id));
  ort.env.wasm.numThreads = 1; // more need headers that simple servers do not send
  const file = await fetch("model.onnx");
  if (!file.ok) return say("model.onnx is not there; write it with `rtdetr export best.pth -o model.onnx`");
  const bytes = new Uint8Array(await file.arrayBuffer());
  const about = metadata(bytes);
  const preprocess = JSON.parse(about.preprocess ?? "{}");
  if (about.outputs !== "detections" || preprocess.input !== "uint8") return say("model.onnx: not a file of `rtdetr export` with detections and uint8 input");
  if (!preprocess.resize.startsWith("OpenCV cubic")) return say("model.onnx: expected a model of images resized with OpenCV's cubic filter, the only one here");
  let session;
  device.onchange = async () => {
    say("loading the model ...");
    const executionProviders = await providers(device.value);
    session = await ort.InferenceSession.create(bytes, { executionProviders });
    const lacking = executionProviders[0] === device.value ? "" : "this browser has no WebGPU, so the CPU computes; ";
    device.value = executionProviders[0];
    say(`${lacking}choose an image`);
  };
  await device.onchange();
  document.getElementById("file").onchange = async (event) => {
    const image = await createImageBitmap(event.target.files[0]);
    const size = [image.height, image.width];
    [canvas.width, canvas.height] = [image.width, image.height];
    const pen = canvas.getContext("2d");
    pen.drawImage(image, 0, 0);
    const start = performance.now();
    const pixels = resized(pen.getImageData(0, 0, canvas.width, canvas.height).data, size, preprocess.size);
    const threshold = Number(document.getElementById("threshold").value);
    const names = JSON.parse(about.names);
    const found = await detect(ort, session, pixels, preprocess.size, size, names, threshold);
    say(`${found.length} objects in ${Math.round(performance.now() - start)} ms, ${device.selectedOptions[0].text}`);
    pen.lineWidth = Math.max(2, image.width / 320);
    pen.font = `${Math.max(12, image.width / 45)}px sans-serif`;
    pen.strokeStyle = pen.fillStyle = "#ff4f00";
    for (const { name, score, box: [x1, y1, x2, y2] } of found) {
      pen.strokeRect(x1, y1, x2 - x1, y2 - y1);
      pen.fillText(`${name} ${score.toFixed(2)}`, x1 + 2, y1 - 4);
    }
  };
}

if (typeof document === "undefined") module.exports = { decode, detect, metadata, planes, resized };
else page().catch((error) => (document.getElementById("status").textContent = String(error)));
