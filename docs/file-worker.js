/* The search of the site runs in a Worker, which browsers refuse to pages opened as files. For them, run its script in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.queue = []
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => Promise.all(urls.map(address => this.load(address)))
      this.load(url).then(() => {
        const queue = this.queue
        this.queue = null
        queue.forEach(data => this.postMessage(data))
      })
    }
    load(url) {
      const script = this.scope.document.createElement("script")
      script.src = new URL(url, location.href).href
      return new Promise((done, failed) => {
        script.onload = done
        script.onerror = failed
        this.scope.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      if (this.queue) this.queue.push(data)
      else this.scope.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {}
  }
}
