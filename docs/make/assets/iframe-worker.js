// The search runs in a worker, which a browser refuses to a page from a disk: there, an iframe is one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = data => setTimeout(() => {  // later, as a worker's
        const message = new MessageEvent("message", { data: structuredClone(data) });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
      const script = inside.document.createElement("script");
      script.src = new URL(url, location);
      this.ready = new Promise(resolve => script.addEventListener("load", resolve));
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
