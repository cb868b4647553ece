// Names of modules in place of numbers, which would depend on the path of this folder: the same source gives the same bytes.
module.exports = { optimization: { moduleIds: 'named', chunkIds: 'named' } };
