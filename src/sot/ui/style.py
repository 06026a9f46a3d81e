"""How the page looks, in light and in dark: system fonts only, one column on a phone."""

from __future__ import annotations

HEADLINE = """<header class="sot-headline"><h1>What do the class token and the words look at?</h1>
<p>A second-order transformer decides from both. Give it an image or a sentence, and see what each branch adds.</p>
</header>"""

GREETING = """<div class="sot-greeting"><h2>Nothing explained yet</h2>
<p>Drop an image or type a sentence, or choose an example. You will see</p>
<ul><li><b>predictions</b> and their probabilities;</li>
<li><b>three maps</b>: which parts drive the class token, the words, and both;</li>
<li><b>pairs of words</b> that carry the cross-covariance evidence, blue for the class, orange against it;</li>
<li><b>branch contributions</b>: what each branch adds to the logits;</li>
<li>the <b>spectrum</b> of each head, before and after normalisation.</li></ul></div>"""

CSS = """
:root { --sot-soft: #475569; --sot-blue: #0072b2; --sot-vermilion: #d55e00; --sot-against: #a84300;
  --sot-focus: #1d4ed8; --sot-bar: #e2e8f0; --sot-refused: #fdf1f0; --sot-refusing: #8c1d18 }
.dark { --sot-soft: #cbd5e1; --sot-blue: #5cb8f5; --sot-vermilion: #ff8f45; --sot-against: #ff9d5c;
  --sot-focus: #93c5fd; --sot-orange: #ffc04d; --sot-green: #35d3a3; --sot-purple: #eaa9cb;
  --sot-sky: #a5dcfa; --sot-grey: #a8b0bd; --sot-bar: #475569; --sot-refused: #45211f; --sot-refusing: #ffd2ce }
.gradio-container { max-width: 1500px !important; margin: 0 auto !important }
.gradio-container, .gradio-container * { overflow-wrap: anywhere }
.gradio-container .html-container { padding: 0 !important }
.sot-headline h1 { font-size: 1.5rem; font-weight: 650; margin: 0 0 .15rem; letter-spacing: -.01em }
.sot-headline p { margin: 0; color: var(--sot-soft) }
.sot-greeting { border: 1px dashed var(--border-color-primary); border-radius: 14px; padding: 1.5rem 2rem }
.sot-greeting h2 { font-size: 1.1rem; font-weight: 600; margin: 0 0 .4rem }
.sot-greeting ul { margin: .5rem 0 0 1.2rem; list-style: disc }
.sot-greeting li { margin: .25rem 0 }
.sot-result header { display: flex; flex-wrap: wrap; gap: .2rem .8rem; align-items: baseline; margin-bottom: .6rem }
.sot-result h2 { font-size: 1.15rem; font-weight: 650; margin: 0 }
.sot-result header span { color: var(--sot-soft) }
.sot-cards { display: grid; gap: .8rem; grid-template-columns: repeat(12, 1fr) }
.sot-card { background: var(--block-background-fill); color: var(--body-text-color);
  border: 1px solid var(--border-color-primary); border-radius: 14px; padding: .8rem .9rem;
  box-shadow: 0 1px 2px rgb(0 0 0 / 5%); min-width: 0; grid-column: span 4 }
.sot-card h3 { font-size: .86rem; font-weight: 600; margin: 0 0 .45rem; color: inherit }
.sot-card :is(img, svg) { width: 100%; height: auto; display: block; margin: 0 }
.sot-card svg { fill: currentColor; stroke-linejoin: round } .sot-card svg text { fill: currentColor }
.sot-said { margin: .4rem 0 0; font-size: .86rem; color: var(--sot-soft) }
.sot-key { display: flex; align-items: center; flex-wrap: wrap; gap: .1rem .4rem; margin: .4rem 0 0; font-size: .82rem;
  color: var(--sot-soft) }
.sot-key i { width: 1.6rem; height: .55rem; border-radius: 3px }
.sot-key .sot-scale { flex: 1 1 2rem; max-width: 9rem }
.sot-map-scale { background: linear-gradient(90deg, #440154, #3b528b, #21918c, #5ec962, #fde725) }
.sot-word-scale { background: linear-gradient(90deg, rgb(13 119 234), rgb(124 242 27)) }
.sot-key .sot-for { background: var(--sot-blue) } .sot-key .sot-against { background: var(--sot-vermilion) }
.sot-links .sot-for { background: #0072b2 } .sot-links .sot-against { background: #d55e00 }
.sot-training { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: center; margin: 0 }
.sot-training progress { flex: 1 1 12rem; accent-color: var(--sot-blue) }
.gradio-container :is(input, textarea, button, a, summary, [tabindex]):focus-visible {
  outline: 3px solid var(--sot-focus) !important; outline-offset: 1px }
.sot-card.sot-map, .sot-card.sot-predictions { grid-column: span 3 }
.sot-cards:has(.sot-words) .sot-card { grid-column: span 6 }
.sot-cards .sot-card.sot-words { grid-column: 1 / -1 }
.sot-words p { line-height: 2; margin: 0 }
.sot-card mark { color: #000; border-radius: 4px; padding: 2px 4px }
.sot-card ol { list-style: none; margin: 0; padding: 0 }
.sot-card li { display: grid; grid-template-columns: 1fr auto; gap: .15rem .6rem; margin-bottom: .5rem;
  font-size: .95rem }
.sot-card li:first-child { font-weight: 650 }
.sot-score { font-variant-numeric: tabular-nums }
.sot-bar { grid-column: 1 / -1; height: 7px; border-radius: 4px; background: var(--sot-bar); overflow: hidden }
.sot-bar i { display: block; height: 100%; border-radius: 4px; background: var(--sot-blue) }
.sot-truth { margin: .3rem 0 0; color: var(--sot-soft) }
.sot-card table { width: 100%; border-collapse: collapse; font-size: .9rem }
.sot-card :is(table, tbody, tr) { border: 0 !important; background: none }
.sot-card td { padding: .15rem .4rem .15rem 0; border: 0; color: inherit }
.sot-card td:last-child { text-align: right; font-variant-numeric: tabular-nums }
td.sot-for { color: var(--sot-blue) !important } td.sot-against { color: var(--sot-against) !important }
.sot-result footer { margin-top: .8rem }
.sot-result nav { display: flex; flex-wrap: wrap; gap: .5rem }
.sot-result nav a { border: 1px solid var(--border-color-primary); border-radius: 9px; padding: .35rem .8rem;
  text-decoration: none; color: inherit; background: var(--background-fill-primary); font-size: .9rem }
.sot-result nav a:hover { border-color: var(--sot-blue); color: var(--sot-blue) }
.sot-notes { margin: .6rem 0 0; padding: 0; list-style: none; font-size: .86rem; color: var(--sot-soft) }
.sot-refusal { border: 1px solid; background: var(--sot-refused); color: var(--sot-refusing); border-radius: 12px;
  padding: .9rem 1.1rem; margin: 0 }
.sot-results { align-items: flex-start }
.sot-results > div { min-width: 0 !important; flex: 1 1 0 }
.sot-results:has(#right .sot-result, #right .sot-refusal) .sot-card { grid-column: span 6 }
.sot-results:has(#right .sot-result, #right .sot-refusal) .sot-card.sot-plot,
.sot-results:has(#right .sot-result, #right .sot-refusal) .sot-card.sot-words { grid-column: 1 / -1 }
.sot-examples .gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(50px, 1fr)); gap: .4rem }
.sot-examples .gallery-item { max-width: none; min-width: 0 }
.sot-examples .gallery-item :is(.container, img) { width: 100% !important; height: auto !important; aspect-ratio: 1;
  object-fit: cover }
.sot-examples.sot-sentences .gallery { display: block }
@media (max-width: 700px) {
  .gradio-container .main.fillable { padding: 1rem .9rem !important }
  .sot-columns, .sot-results { flex-direction: column }
  .sot-columns > div { width: 100% }
  .sot-results > div { width: 100%; flex: none }
  .sot-cards .sot-card { grid-column: 1 / -1 !important }
  .sot-cards .sot-card.sot-map { grid-column: span 4 !important; padding: .5rem }
  .sot-cards { gap: .5rem }
  .sot-map .sot-key { flex-wrap: nowrap; gap: .2rem; font-size: .75rem }
  .sot-map .sot-key .sot-scale { flex-basis: .5rem; min-width: 0 }
  .sot-map h3 { font-size: .78rem; min-height: 2.4em }
  .sot-greeting { padding: 1rem 1.1rem }
}
"""

SCROLL = "() => { if (innerWidth < 700) document.querySelector('#left').scrollIntoView({ behavior: 'smooth' }) }"
