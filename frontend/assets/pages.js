// What pages do by themselves. Without it they work too.
(() => {
  'use strict';
  const all = (selector, act) => document.querySelectorAll(selector).forEach(act);

  // 3d 4h, 12m 5s, 8s: as the server says it.
  const short = (seconds) => {
    const s = Math.max(0, Math.floor(seconds));
    const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
    if (d) return `${d}d ${h}h`;
    if (h) return `${h}h ${m}m`;
    return m ? `${m}m ${s % 60}s` : `${s}s`;
  };

  // Times go on. What the server said counts from when it was said.
  const said = new WeakMap();
  setInterval(() => {
    if (document.hidden) return;
    all('time.ago', (time) => { time.textContent = `${short((Date.now() - Date.parse(time.dateTime)) / 1000)} ago`; });
    all('.ticks', (span) => {
      const known = said.get(span);
      if (!known || known.seconds !== span.dataset.seconds) said.set(span, { seconds: span.dataset.seconds, at: Date.now() });
      else span.textContent = short(Number(known.seconds) + (Date.now() - known.at) / 1000);
    });
  }, 1000);

  // What was old when it was sent is asked for again.
  const again = () => {
    if (document.querySelector('#content[data-stale]')) setTimeout(() => htmx.trigger('#again', 'again'), 1000);
  };

  // A log is followed until somebody scrolls up; what is far above is let go.
  const MOST = 5000;
  const follow = () => {
    const lines = document.querySelector('#lines');
    if (!lines) return;
    while (lines.childElementCount > MOST) lines.firstElementChild.remove();
    if (document.querySelector('#follow')?.checked) lines.scrollTop = lines.scrollHeight;
  };
  const reading = (event) => {
    const lines = event.target;
    const box = document.querySelector('#follow');
    if (lines.id === 'lines' && box) box.checked = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
  };

  // A build that has begun or ended has another log.
  const renew = () => {
    const [shown, due] = [document.querySelector('#log'), document.querySelector('#log-of')];
    if (!shown || !due || shown.dataset.log === due.dataset.log) return;
    shown.dataset.log = due.dataset.log;
    htmx.ajax('GET', location.pathname, { target: '#log', select: '#log', swap: 'outerHTML' });
  };

  // The line that the address names.
  const point = () => {
    all('.l.here', (line) => line.classList.remove('here'));
    const line = /^#L\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (line) { line.classList.add('here'); line.scrollIntoView({ block: 'center' }); }
  };

  document.addEventListener('DOMContentLoaded', () => { again(); follow(); point(); });
  document.addEventListener('htmx:afterSettle', (event) => { if (event.target.id === 'content') { again(); renew(); } });
  document.addEventListener('htmx:sseMessage', follow);
  document.addEventListener('scroll', reading, true);
  addEventListener('hashchange', point);
})();
