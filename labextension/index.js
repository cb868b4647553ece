// Code completion in JupyterLab by minillm: a provider of inline completions, and a panel that shows how one was made.
// Plain JavaScript: `make labextension` packs it for JupyterLab and writes minillm/complete/labextension.

import { ICommandPalette, MainAreaWidget, Notification } from '@jupyterlab/apputils';
import { ICompletionProviderManager } from '@jupyterlab/completer';
import { PageConfig, Text, URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

const NAME = 'minillm';
const SHOW_PANEL = 'minillm:show-completion';
const MAX_TOKENS = 24;
const PYTHON = ['text/x-python', 'text/x-ipython']; // not 'text/x-ipythongfm', which is Markdown
const QUIET_MS = 300; // the panel is drawn so long after an answer, unless a key follows: drawing would slow the next

// 'on' or 'off': what the server suggests as the default. '': there is no server extension.
const SERVER = PageConfig.getOption('minillmComplete');
const NO_SERVER =
  'The server extension minillm.complete is not enabled. Start JupyterLab with "minillm lab --complete", or run ' +
  '"jupyter server extension enable minillm.complete" and restart it.';

/** The answer of an address below /minillm/complete, as JSON. Throws an Error with the server's sentence. */
async function ask(path, init) {
  const settings = ServerConnection.makeSettings();
  const url = URLExt.join(settings.baseUrl, 'minillm', 'complete', path);
  const response = await ServerConnection.makeRequest(url, init, settings);
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    const missing = response.status === 404 ? NO_SERVER : `The server answered ${response.status}.`;
    throw new Error(answer.error || answer.message || missing);
  }
  return answer;
}

/** The code cells of a notebook before the active one; in a file there are none. */
function cellsBefore(widget) {
  const cells = widget?.content?.widgets ?? [];
  const active = widget?.content?.activeCellIndex ?? 0;
  return cells
    .slice(0, active)
    .filter(cell => cell.model?.type === 'code')
    .map(cell => cell.model.sharedModel.getSource().trimEnd() + '\n\n');
}

class Provider {
  constructor() {
    this.identifier = NAME;
    this.name = NAME;
    this.schema = {
      properties: {
        maxTokens: {
          title: 'Most tokens',
          description: 'The most tokens of a suggestion. More take longer.',
          type: 'integer',
          minimum: 1,
          maximum: 256
        }
      },
      default: {
        enabled: SERVER === 'on',
        maxTokens: MAX_TOKENS,
        autoFillInMiddle: true, // or JupyterLab asks for nothing inside a line
        debouncerDelay: 0,
        timeout: 60000
      }
    };
    this.maxTokens = MAX_TOKENS;
    this.onRequest = () => {};
    this.onAnswer = () => {}; // or a failure
    this._request = new AbortController();
    this._told = new Set();
  }

  configure(settings) {
    this.maxTokens = settings.maxTokens ?? MAX_TOKENS;
  }

  /** Called by JupyterLab at each key, unless the line is blank before the cursor. The request of the call before is
   * aborted, here and in the engine. */
  async fetch(request, context) {
    this._request.abort();
    const mine = (this._request = new AbortController());
    const { text, offset, mimeType } = request;
    if (mimeType && !PYTHON.includes(mimeType)) {
      return { items: [] };
    }
    const cursor = Text.charIndexToJsIndex(offset, text); // `offset` counts an emoji once, a string of JavaScript twice
    const body = {
      prefix: cellsBefore(context.widget).join('') + text.slice(0, cursor),
      suffix: text.slice(cursor),
      max_tokens: this.maxTokens
    };
    if (!body.prefix.trim()) {
      return { items: [] };
    }
    this.onRequest();
    try {
      const found = await ask('', { method: 'POST', body: JSON.stringify(body), signal: mine.signal });
      return { items: found.text ? [{ insertText: found.text }] : [] };
    } catch (problem) {
      if (!mine.signal.aborted) {
        this._tell(problem.message);
      }
      return { items: [] };
    } finally {
      if (!mine.signal.aborted) {
        this.onAnswer();
      }
    }
  }

  /** Show a problem once, not at every key. Numbers in it (of the request, of bytes) may change; a status tells more. */
  _tell(message) {
    const kind = message.replace(/(answered )?\d+/g, (all, status) => (status ? all : '0'));
    if (!this._told.has(kind)) {
      this._told.add(kind);
      Notification.error(`Code completion: ${message}`, { autoClose: 15000 });
    }
  }
}

/** How the newest suggestion was made: drawn by the server from the engine's events. */
class Panel extends Widget {
  constructor(provider) {
    super();
    this._provider = provider;
    this._asked = 0;
    this.id = 'minillm-completion';
    this.title.label = 'Completion';
    this.title.closable = true;
    this.node.style.cssText = 'overflow: auto; padding: 8px 12px;';
    this.node.dataset.testid = 'minillm-panel';
    provider.onRequest = () => clearTimeout(this._timer);
    provider.onAnswer = () => this.refreshSoon();
    void this.refresh();
  }

  refreshSoon() {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => this.refresh(), QUIET_MS);
  }

  async refresh() {
    const number = (this._asked += 1);
    const isOld = () => this.isDisposed || number !== this._asked;
    try {
      const { html } = await ask('panel', { method: 'GET' });
      if (!isOld()) {
        this.node.innerHTML = html;
      }
    } catch (problem) {
      if (!isOld()) {
        this.node.textContent = problem.message;
      }
    }
  }

  /** The provider outlives the panel. */
  dispose() {
    if (!this.isDisposed) {
      clearTimeout(this._timer);
      this._provider.onRequest = this._provider.onAnswer = () => {};
    }
    super.dispose();
  }
}

const plugin = {
  id: '@minillm/complete:plugin',
  description: 'Code completion by minillm.',
  autoStart: true,
  requires: [ICompletionProviderManager],
  optional: [ICommandPalette],
  activate: (app, manager, palette) => {
    const provider = new Provider();
    manager.registerInlineProvider(provider);
    let panel = null;
    app.commands.addCommand(SHOW_PANEL, {
      label: 'Show How minillm Completed the Code',
      execute: () => {
        if (!panel || panel.isDisposed) {
          panel = new MainAreaWidget({ content: new Panel(provider) });
          panel.id = 'minillm-completion-panel';
          app.shell.add(panel, 'main', { mode: 'split-right', activate: false });
        } else {
          app.shell.activateById(panel.id); // it may be behind another tab
        }
      }
    });
    palette?.addItem({ command: SHOW_PANEL, category: 'minillm' });
  }
};

export default plugin;
