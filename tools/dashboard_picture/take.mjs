// Bundles page.tsx and photographs it: node take.mjs CHROMIUM DASHBOARD.json ANSWERS.json PICTURE.png
import { readFileSync } from 'node:fs';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const WIDTH = 1600;
const ORIGIN = 'http://dashboard.invalid/'; // nothing is asked of it: a page without an origin has no localStorage
const READY_MS_MAX = 60_000;

const [executablePath, dashboard, answers, picture] = process.argv.slice(2);
const { outputFiles } = await build({
  entryPoints: [new URL('page.tsx', import.meta.url).pathname],
  bundle: true,
  write: false,
  outdir: 'out',
  format: 'iife',
  jsx: 'automatic',
  minify: true,
  logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
  loader: { '.ttf': 'empty', '.woff': 'dataurl', '.woff2': 'dataurl', '.svg': 'dataurl', '.png': 'dataurl' },
});
const [style, script] = ['.css', '.js'].map((end) => outputFiles.find((f) => f.path.endsWith(end)).text);

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
try {
  const page = await browser.newPage({ viewport: { width: WIDTH, height: 1000 } });
  const errors = [];
  page.on('pageerror', (error) => errors.push(error));
  const body = `<!doctype html><style>body { margin: 0 } ${style}</style><div id="root"></div>`;
  await page.route('**', (route) => (route.request().url() === ORIGIN ? route.fulfill({ body, contentType: 'text/html' }) : route.abort()));
  await page.goto(ORIGIN);
  await page.evaluate((shown) => Object.assign(window, shown), {
    dashboard: JSON.parse(readFileSync(dashboard)),
    found: JSON.parse(readFileSync(answers)),
  });
  await page.addScriptTag({ content: script });
  await page.waitForFunction('window.drawn', null, { timeout: READY_MS_MAX }).catch((error) => errors.push(error));
  if (errors.length > 0) {
    throw new AggregateError(errors, 'the page failed');
  }
  await page.screenshot({ path: picture, fullPage: true });
} finally {
  await browser.close();
}
