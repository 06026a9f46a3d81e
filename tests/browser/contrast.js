// Of every text that is seen: its contrast to what is behind it (WCAG 2), and its size in pixels.
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true })
  const parse = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = '#000'; canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1)
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data
    return [r, g, b, a / 255]
  }
  const over = (top, below) => [0, 1, 2].map(k => top[k] * top[3] + below[k] * (1 - top[3]))
  const behind = element => {
    if (!element) return [255, 255, 255]
    const own = parse(getComputedStyle(element).backgroundColor)
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(element.parentElement))
  }
  const light = c => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0)
  const found = [], shown = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    const range = document.createRange()
    range.selectNodeContents(walker.currentNode)
    shown.push([walker.currentNode.parentElement, walker.currentNode.data.trim(), range.getBoundingClientRect()])
  }
  for (const input of document.querySelectorAll('input:not([type=file]), textarea'))
    shown.push([input, input.value, input.getBoundingClientRect()])
  for (const [element, text, box] of shown) {
    const style = getComputedStyle(element)
    if (!text || !box.width || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue
    const drawn = element instanceof SVGElement
    let seen = 1
    for (let e = element; e; e = e.parentElement) seen *= Number(getComputedStyle(e).opacity)
    const ground = behind(element), letters = parse(drawn ? style.fill : style.color)
    letters[3] *= seen
    const [high, low] = [light(over(letters, ground)), light(ground)].sort((a, b) => b - a)
    const scale = drawn ? element.ownerSVGElement.getScreenCTM().a : 1
    const size = parseFloat(style.fontSize) * scale
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700)
    found.push({ text: text.slice(0, 40), ratio: (high + 0.05) / (low + 0.05), needed: large ? 3 : 4.5, size, drawn })
  }
  return found
}
