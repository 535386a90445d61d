"""Holds what the report adds to the style of both pages of a run. Pure."""

SHEET = """
header .eyebrow { margin: 0; color: var(--muted); font-size: 13px; letter-spacing: .02em; }
h1 { margin: 4px 0 6px; }
.meta { margin: 0 0 20px; color: var(--muted); overflow-wrap: anywhere; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(max(140px, 22%), 1fr));
  margin-bottom: 20px; }
aside { border-left: 4px solid var(--left); padding: 12px 18px; }
aside ul { margin: 4px 0 0; padding-left: 20px; }
.chart.run { min-width: 640px; }
.again { fill: var(--wasted); fill-opacity: .75; }
.mark { stroke-width: 1.2; stroke-dasharray: 4 3; }
.cross path { stroke: var(--fault); stroke-width: 2.4; fill: none; stroke-linecap: round; }
.bar.tall { height: 30px; }
.bar.low { height: 13px; width: 230px; margin-top: 4px; }
td .key { white-space: normal; align-items: baseline; }
#time tr:last-child td { font-weight: 600; border-top: 2px solid var(--line); }
.tag { display: inline-block; padding: 0 7px; border-radius: 9px; border: 1px solid currentColor;
  font-size: 12px; line-height: 17px; white-space: nowrap; }
#recoveries .bar.low { width: 170px; }
#recoveries th, #recoveries td { padding-right: 10px; }
#recoveries th:last-child, #recoveries td:last-child { padding-right: 0; }
.words { overflow-wrap: anywhere; min-width: 220px; }
details { margin-top: 2px; }
summary { cursor: pointer; color: var(--accent); font-size: 12.5px; }
pre { margin: 6px 0 2px; padding: 8px 10px; background: var(--soft); border-radius: 6px;
  font: 12px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 340px; overflow-y: auto; }
@media (max-width: 560px) {
  main { padding: 18px 10px 32px; }
  section { padding: 14px 12px; }
  h1, .tile .value { font-size: 18px; }
}
@media print {
  body { font-size: 12px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  .tile, section, aside { border-color: #ccc; border-radius: 0; }
  section { padding: 10px 0; border-width: 1px 0 0; margin: 0; }
  .scroll { overflow: visible; }
  .chart.run { min-width: 0; }
  .tile, tr, .chart, .legend { break-inside: avoid; }
  h2, h3, .lead, thead { break-after: avoid; }
  table { font-size: 10.5px; }
  pre { max-height: none; overflow: visible; }
}
"""
