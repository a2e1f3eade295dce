// The chats in the browser's IndexedDB, which has room for images. A chat is {id, title, changed, turns}.

const database = new Promise((resolve, reject) => {
  const request = indexedDB.open("mlx_mtp", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
database.catch(() => {});  // each call below reports it

async function run(mode, act) {
  const store = (await database).transaction("chats", mode).objectStore("chats");
  return new Promise((resolve, reject) => {
    const request = act(store);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const loadChats = () => run("readonly", (store) => store.getAll());
export const saveChat = (chat) => run("readwrite", (store) => store.put(chat));
export const deleteChat = (chat) => run("readwrite", (store) => store.delete(chat.id));
