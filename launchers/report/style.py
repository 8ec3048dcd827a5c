"""The style sheet and the script of the page. Text on its background has a contrast of at least 4.5 in both modes."""

# .zoom, touch-action: a browser that pans by touch sends pointercancel in place of further pointermove.
# Dark on screens only: browsers print no backgrounds by default, and light text would be lost on paper.
CSS = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#57606a;--line:#d0d7de;--card:#f6f8fa;--focus:#0550ae;
--s0:#0969da;--s1:#bc4c00;--s2:#1a7f37;--s3:#8250df;--s4:#bf3989;--s5:#1b7c83;--s6:#9a6700;--s7:#cf222e;
--step:#2da44e;--data_wait:#bf8700;--evaluation:#0969da;--save:#8250df;--restore:#bf3989;--compile:#1b7c83;
--start:#54aeff;--export:#6e7781;--lost:#cf222e;--recovery:#fb8f44;--queue:#afb8c1;--other:#d0d7de}
@media screen and (prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--dim:#9198a1;--line:#30363d;
--card:#161b22;--focus:#58a6ff;
--s0:#58a6ff;--s1:#f0883e;--s2:#3fb950;--s3:#bc8cff;--s4:#f778ba;--s5:#39c5cf;--s6:#d29922;--s7:#ff7b72;
--start:#1f6feb;--queue:#484f58;--other:#30363d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:1.5rem;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .6rem}.lead{font-size:1.1rem;margin:.4rem 0 1rem}
.dim,figcaption{color:var(--dim)}figure{margin:0;background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:.6rem}
.grid-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:.8rem}
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.s-rank{fill:var(--s0)}.grid{stroke:var(--line);fill:none}.mark{stroke:var(--lost);stroke-dasharray:3 3;fill:none}
polyline{fill:none;stroke-width:1.4;stroke-linejoin:round}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{text-align:left;
padding:.25rem .7rem .25rem 0;
border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right}caption{text-align:left;
color:var(--dim);padding-bottom:.3rem}
.scroll{overflow-x:auto}.key{display:inline-block;width:.9em;height:.9em;border-radius:2px;margin-right:.4em;
vertical-align:-.1em;
background:currentColor;border:1px solid var(--line)}.legend{list-style:none;display:flex;flex-wrap:wrap;
gap:.2rem 1rem;padding:0;margin:.3rem 0 0}
.bar svg{height:34px;border-radius:4px}.axis{display:grid;grid-template-columns:max-content 1fr;column-gap:.6rem}
.axis ol{list-style:none;margin:0;padding:0}.axis li{height:16px;line-height:16px;font-size:11px;color:var(--dim)}
.zoom{overflow:hidden;touch-action:none}.zoom svg{width:100%}.times{display:flex;justify-content:space-between;
font-size:11px;color:var(--dim)}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.8rem;overflow:auto;
font-size:12.5px}
summary{cursor:pointer}button{font:inherit;color:var(--fg);background:var(--card);border:1px solid var(--line);
border-radius:4px;padding:.1rem .6rem}
:focus-visible{outline:2px solid var(--focus);outline-offset:2px}
@media print{body{max-width:none;padding:0}figure,table{break-inside:avoid}button{display:none}details{display:block}}
"""
CAUSES = "".join(
    f".c-{name}{{fill:var(--{name});color:var(--{name})}}"
    for name in (
        "step", "data_wait", "evaluation", "save", "restore", "compile", "start", "export", "lost", "recovery", "queue",
        "other",
    )
)  # fmt: skip
SERIES = "polyline.run{opacity:.45}polyline.best{stroke-width:3}" + "".join(
    f"polyline.s{n}{{stroke:var(--s{n})}}circle.s{n}{{fill:var(--s{n})}}.key.s{n}{{color:var(--s{n})}}"
    for n in range(8)
)
SCRIPT = """
for (const box of document.querySelectorAll('.zoom')) {
  const svg = box.querySelector('svg'), full = 10000, height = svg.viewBox.baseVal.height;
  const labels = box.parentNode.querySelector('.times').children, total = +box.dataset.seconds;
  let left = 0, width = full;
  const text = s => s < 120 ? s.toFixed(s < 10 ? 1 : 0) + ' s'
    : s < 7200 ? (s / 60).toFixed(1) + ' min' : (s / 3600).toFixed(1) + ' h';
  const show = () => {
    width = Math.min(full, Math.max(full / 20000, width)); left = Math.min(full - width, Math.max(0, left));
    svg.setAttribute('viewBox', left + ' 0 ' + width + ' ' + height);
    [...labels].forEach((one, i) => one.textContent = text((left + width * i / (labels.length - 1)) / full * total));
  };
  const zoom = (factor, at) => { left += at * width * (1 - factor); width *= factor; show(); };
  box.addEventListener('wheel', e => { if (!e.ctrlKey && !e.shiftKey) return; e.preventDefault();
    zoom(e.deltaY > 0 ? 1.25 : 0.8, e.offsetX / box.clientWidth); }, {passive: false});
  box.addEventListener('keydown', e => {
    const done = {'+': () => zoom(0.5, 0.5), '-': () => zoom(2, 0.5), '0': () => { left = 0; width = full; show(); },
      ArrowLeft: () => { left -= width / 5; show(); }, ArrowRight: () => { left += width / 5; show(); }}[e.key];
    if (done) { e.preventDefault(); done(); } });
  let from = null;
  box.addEventListener('pointerdown', e => { from = e.clientX; box.setPointerCapture(e.pointerId); });
  box.addEventListener('pointermove', e => { if (from === null) return;
    left -= (e.clientX - from) / box.clientWidth * width; from = e.clientX; show(); });
  box.addEventListener('pointerup', () => from = null);
  for (const button of box.closest('.axis-box').querySelectorAll('button'))
    button.addEventListener('click', () => box.dispatchEvent(new KeyboardEvent('keydown', {key: button.dataset.key})));
  show();
}
"""
